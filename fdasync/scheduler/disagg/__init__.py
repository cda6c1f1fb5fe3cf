"""Decisions about requests that one instance prefills and another one decodes: the prefill side and the decode side."""
