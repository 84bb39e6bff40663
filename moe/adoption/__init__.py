"""Convoy's layers in models of transformers, with the parameters that the models have."""
