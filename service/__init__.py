"""The application: gRPC edge, job state, dispatcher, executors, the pipeline, the gate, signing.

python -m service [--config FILE]
"""
