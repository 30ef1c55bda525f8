"""A stand-in for the quantizer that vllm-gaudi calls where QUANT_CONFIG names its file."""
