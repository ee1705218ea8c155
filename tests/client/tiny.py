"""The folders of a tiny conversion, written without any framework."""

import json
import math
import random
import struct
from pathlib import Path

LABELS = ("benign", "injection")
WORDS = tuple(f"w{index}" for index in range(40))
VOCABULARY = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS)
HIDDEN, FFN, POSITIONS = 16, 32, 64

RECIPE = "stages:\n  - method: export\n"
POLICY = "gates:\n  size: {max_ratio: 1.05}\n  flips: {max_share: 0.05}\n"
EVALUATION = "max_length: 24\nlatency: {batch_sizes: [1], sequence_lengths: [8], warmup: 1, repeats: 3}\n"


def write_safetensors(file: Path, shapes: dict[str, tuple[int, ...]], seed: int = 0) -> None:
    """F32 tensors of small random numbers, without any framework."""
    header, body, generator = {}, bytearray(), random.Random(seed)
    for name, shape in shapes.items():
        values = [generator.gauss(0, 0.3) for _ in range(math.prod(shape))]
        begin = len(body)
        body += struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(body)]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(struct.pack("<Q", len(text)) + text + body)


def bert_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor of a one-layer BERT classifier."""
    shapes: dict[str, tuple[int, ...]] = {}

    def linear(name: str, outputs: int, inputs: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (outputs, inputs), (outputs,)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (HIDDEN,), (HIDDEN,)

    for table, rows in (("word", len(VOCABULARY)), ("position", POSITIONS), ("token_type", 2)):
        shapes[f"bert.embeddings.{table}_embeddings.weight"] = (rows, HIDDEN)
    norm("bert.embeddings.LayerNorm")
    layer = "bert.encoder.layer.0"
    for projection in ("self.query", "self.key", "self.value", "output.dense"):
        linear(f"{layer}.attention.{projection}", HIDDEN, HIDDEN)
    norm(f"{layer}.attention.output.LayerNorm")
    linear(f"{layer}.intermediate.dense", FFN, HIDDEN)
    linear(f"{layer}.output.dense", HIDDEN, FFN)
    norm(f"{layer}.output.LayerNorm")
    linear("bert.pooler.dense", HIDDEN, HIDDEN)
    linear("classifier", len(LABELS), HIDDEN)
    return shapes


def write_model(folder: Path) -> None:
    """A complete model folder: config, weights, tokenizer."""
    folder.mkdir()
    config = {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "vocab_size": len(VOCABULARY),
        "hidden_size": HIDDEN,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": FFN,
        "max_position_embeddings": POSITIONS,
        "type_vocab_size": 2,
        "pad_token_id": 0,
        "id2label": {str(index): label for index, label in enumerate(LABELS)},
        "label2id": {label: index for index, label in enumerate(LABELS)},
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", bert_shapes())
    special = {name: f"[{name[:3].upper()}]" for name in ("pad_token", "unk_token", "cls_token", "sep_token")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": POSITIONS, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]},
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {token: index for index, token in enumerate(VOCABULARY)},
            "unk_token": "[UNK]",
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def write_llama(folder: Path, seed: int = 0) -> None:
    """A model of an architecture that only a merge takes: config and weights."""
    folder.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "tie_word_embeddings": True}
    sizes = {"vocab_size": 24, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": HIDDEN // 2}
    (folder / "config.json").write_text(json.dumps(config | sizes | heads | {"max_position_embeddings": POSITIONS}))
    layer = "model.layers.0"
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (24, HIDDEN), "model.norm.weight": (HIDDEN,)}
    shapes |= {f"{layer}.self_attn.{name}_proj.weight": (HIDDEN, HIDDEN) for name in "qo"}
    shapes |= {f"{layer}.self_attn.{name}_proj.weight": (HIDDEN // 2, HIDDEN) for name in "kv"}
    shapes |= {f"{layer}.mlp.{name}_proj.weight": (FFN, HIDDEN) for name in ("gate", "up")}
    shapes |= {f"{layer}.mlp.down_proj.weight": (HIDDEN, FFN)}
    shapes |= {f"{layer}.{name}_layernorm.weight": (HIDDEN,) for name in ("input", "post_attention")}
    write_safetensors(folder / "model.safetensors", shapes, seed)


def write_adapter(folder: Path, seed: int = 0) -> None:
    """A rank-2 LoRA on the Llama's q_proj, scaled by a half."""
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 1, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes: dict[str, tuple[int, ...]] = {
        f"{module}.lora_A.weight": (2, HIDDEN),
        f"{module}.lora_B.weight": (HIDDEN, 2),
    }
    write_safetensors(folder / "adapter_model.safetensors", shapes, seed)


def write_rows(folder: Path, rows: int, seed: int) -> None:
    """A labelled dataset of random words."""
    folder.mkdir()
    generator = random.Random(seed)
    texts = [" ".join(generator.choices(WORDS, k=generator.randint(1, 9))) for _ in range(rows)]
    lines = [json.dumps({"text": text, "label": LABELS[len(text) % 2]}) for text in texts]
    (folder / "rows.jsonl").write_text("\n".join(lines))
