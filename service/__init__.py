"""The application: gRPC edge, job state, dispatcher, workers, the pipeline, the gate, signing.

python -m service [--config FILE]
"""
