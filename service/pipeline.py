"""The main path: submit -> ingest -> preflight -> plan -> compress -> export -> evaluate -> drift -> gate -> sign -> publish.

Each arrow is one immutable value, each step one function. This module is torch-free and runs in the service process;
the compute steps run in the conversion's worker process, and the verdict is computed here, from what they measured.
"""
