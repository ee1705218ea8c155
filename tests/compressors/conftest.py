"""A tiny seeded BERT classifier with tokenizer and companions, data that it can be distilled on, adapters for it."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertForSequenceClassification, PreTrainedTokenizerFast

from compressors.stages import Data
from modelpress.datasets import LabelledTexts
from tests.compressors.lora_merges import Bases, Bench

LABELS = ("benign", "injection")
WORDS = tuple(f"w{index}" for index in range(40))
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
LAYERS, HIDDEN, FFN = 2, 16, 32


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True, scope="session")
def no_progress_bars() -> None:
    transformers.utils.logging.disable_progress_bar()


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    return Bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def tiny_config(**changes: object) -> BertConfig:
    fields: dict[str, object] = {
        "vocab_size": len(SPECIAL) + len(WORDS),
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "intermediate_size": FFN,
        "max_position_embeddings": 24,
        "initializer_range": 0.35,
        "id2label": dict(enumerate(LABELS)),
        "label2id": {label: index for index, label in enumerate(LABELS)},
    }
    return BertConfig(**{**fields, **changes})


def write_tokenizer(folder: Path) -> None:
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )
    fast.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
    fast.save_pretrained(folder)


def write_model(folder: Path, *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: object) -> Path:
    """A complete model folder with two companions, one of them in a folder of its own."""
    torch.manual_seed(seed)
    model = BertForSequenceClassification(tiny_config(**changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.1)
    model.to(dtype).save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "README.md").write_text("# a model card\r\n")
    (folder / "assets").mkdir()
    (folder / "assets/labels.txt").write_bytes(b"\x00\xff")
    return folder


def random_texts(rows: int, *, seed: int) -> tuple[str, ...]:
    generator = random.Random(seed)
    return tuple(" ".join(generator.choices(WORDS, k=generator.randint(1, 9))) for _ in range(rows))


@pytest.fixture(scope="session")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Read only: a test that changes a model writes its own."""
    return write_model(tmp_path_factory.mktemp("models") / "bert")


@pytest.fixture(scope="session")
def data() -> Data:
    texts, held_out = random_texts(96, seed=1), random_texts(48, seed=2)
    return Data(
        train=LabelledTexts(texts, tuple(LABELS[len(text) % 2] for text in texts)),
        held_out=LabelledTexts(held_out, tuple(LABELS[len(text) % 2] for text in held_out)),
        provenance="random words",
    )


AdapterMaker = Callable[..., Path]


@pytest.fixture
def make_adapter(bert: Path, tmp_path: Path) -> AdapterMaker:
    """`make_adapter(seed=1, **LoraConfig fields)`: an adapter for `bert`, written by PEFT, every tensor random."""

    def make(seed: int = 1, base: Path = bert, **fields: object) -> Path:
        folder = tmp_path / f"adapter-{seed}"
        with warnings.catch_warnings():
            # PEFT takes the bias of a lora_B for an unfinished shard of a matrix, and warns.
            warnings.filterwarnings("ignore", message=".*invalid shape")
            peft_model(base, seed=seed, **fields).save_pretrained(folder)
        return folder

    return make


def peft_model(base: Path, *, seed: int, **fields: object) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    settings = {"r": 4, "lora_alpha": 6, "target_modules": ["query", "value"], "task_type": "SEQ_CLS", **fields}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=FutureWarning)
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out.*|.*bias.*", category=UserWarning)
        model = get_peft_model(BertForSequenceClassification.from_pretrained(base), LoraConfig(**settings))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model.eval()


def edit_json(file: Path, **fields: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
