"""What tests start and check with: engines on the synthetic runner, faults, leak checks, the model of passes."""
