"""What tests need beside the product: fakes that pass the same specification as the real parts."""
