"""What the forkserver imports once, so that a conversion's process starts with it: import this only there.

It imports and computes nothing: one tensor operation here would start threads that a forked child does not have, and
the child would hang at its first backward pass. Importing `transformers` alone is lazy, hence the model modules.
"""

from __future__ import annotations

import gc
import logging
import threading

from service.workers.surroundings import clean_environment

clean_environment()
for _name in ("torchao", "torch.utils._pytree", "torch.onnx"):
    logging.getLogger(_name).setLevel(logging.ERROR)  # they warn each time, about nothing that is used here

import onnx  # noqa: E402, F401
import onnxscript  # noqa: E402, F401
import peft  # noqa: E402, F401
import torch  # noqa: E402, F401
import torch_pruning  # noqa: E402, F401
import torchao.quantization.pt2e.quantize_pt2e  # noqa: E402, F401
import tqdm  # type: ignore[import-untyped]  # noqa: E402
import transformers.models.bert.modeling_bert  # noqa: E402
import transformers.models.bert.tokenization_bert  # noqa: E402, F401

import service.workers.operations  # noqa: E402, F401

tqdm.tqdm.set_lock(threading.RLock())  # its own is a named semaphore, which every stopped worker would leave behind

gc.collect()
gc.freeze()  # the collector of a child would otherwise touch, and so copy, every page of these modules
