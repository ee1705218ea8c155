"""Benchmarks: figures with peers measured in the same run. `make bench`, or `make bench B=NAME` for one."""
