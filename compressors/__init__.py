"""Compressors: a model folder in, a model folder out. One method, one file; `registry.COMPRESSORS` lists them."""
