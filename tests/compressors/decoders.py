"""Tiny decoder language models of every family with tokenizer and companions, and texts that they can learn."""

from __future__ import annotations

import atexit
import json
import random
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
VOCABULARY = 128
WORDS = tuple(f"w{index}" for index in range(VOCABULARY - len(SPECIAL)))
FOLLOWERS = 4
"""Words that may follow a word: what there is to learn in the texts."""
CHAT_TEMPLATE = "{% for message in messages %}<s> {{ message['content'] }} </s>{% endfor %}"
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_decoder(
    folder: Path, *, model_type: str = "llama", seed: int = 0, dtype: str = "float32", tie: bool = True, **config: Any
) -> Path:
    """A complete model folder with random weights; `config` changes fields of its config."""
    _save(random_decoder(model_type=model_type, seed=seed, tie=tie, **config).to(getattr(torch, dtype)), folder)
    return folder


def random_decoder(*, model_type: str = "llama", seed: int = 0, tie: bool = True, **config: Any) -> Any:
    """A model of the family whose every weight is random: norms near 1, biases not 0."""
    fields = {**SIZES, "tie_word_embeddings": tie, "initializer_range": 0.15, **config}
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[model_type](**fields))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
            elif parameter.dim() == 1:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def make_texts(folder: Path, *, rows: int, seed: int, words: int = 40) -> Path:
    """A dataset folder with `data.jsonl`: `rows` texts of so many words in the column `text`."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"text": text}) for text in word_texts(rows, seed=seed, words=words))
    (folder / "data.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def word_texts(rows: int, *, seed: int, words: int) -> tuple[str, ...]:
    """Texts in which each word is followed by one of FOLLOWERS words, the first of them most often."""
    generator = random.Random(seed)
    return tuple(" ".join(WORDS[index] for index in _walk(generator, words)) for _ in range(rows))


def trained_decoder(*, model_type: str = "llama", seed: int = 0, steps: int = 150, tie: bool = True) -> Path:
    """A model folder trained on texts like those of `make_texts`, made once per process: read only.

    Its perplexity on such texts lies near that of the texts themselves, about 3.
    """
    return _trained(model_type, seed, steps, tie)


@cache
@torch.enable_grad()
def _trained(model_type: str, seed: int, steps: int, tie: bool) -> Path:
    folder = Path(mkdtemp(prefix="decoder-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    model = random_decoder(model_type=model_type, seed=seed, tie=tie, initializer_range=0.02).train()
    generator = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=steps)
    for _ in range(steps):
        ids_BT = torch.tensor([[len(SPECIAL) + index for index in _walk(generator, 48)] for _ in range(16)])
        loss = model(input_ids=ids_BT, labels=ids_BT).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    _save(model.eval(), folder)
    return folder


def _walk(generator: random.Random, words: int) -> list[int]:
    """Indices into WORDS. The followers of word i are 7 i + 13 k + 1 modulo their number, k < FOLLOWERS."""
    walk = [generator.randrange(len(WORDS))]
    while len(walk) < words:
        (step,) = generator.choices(range(FOLLOWERS), weights=(8, 4, 2, 1))
        walk.append((7 * walk[-1] + 13 * step + 1) % len(WORDS))
    return walk


def _save(model: Any, folder: Path) -> None:
    model.save_pretrained(folder)
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 0}))
    (folder / "README.md").write_text("# a model card\r\n")


def write_tokenizer(folder: Path) -> None:
    """One token per word, none added by itself: the ids of a text are those of its words."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    fast.save_pretrained(folder)
