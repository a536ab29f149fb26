"""Adapters to serving engines and model libraries; each imports its engine only when it is used."""
