"""For PyTorch: samplers that read chunk by chunk, and datasets without a mount. Empty so far."""
