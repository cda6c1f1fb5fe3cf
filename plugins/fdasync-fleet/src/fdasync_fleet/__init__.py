"""Prefill/decode disaggregation: instances that hand requests to each other, and the router in front of them."""
