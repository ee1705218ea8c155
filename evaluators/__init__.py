"""Evaluators: stored models and datasets in, numbers out, measured in the runtime that the artifact is meant for."""
