"""The layouts of quantised tensors: which stored tensors make one of the model, and the arithmetic of its rows."""
