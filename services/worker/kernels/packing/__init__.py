"""Where matrix cores want numbers to lie, and in which of two fp8 forms: pure torch, each with its way back."""
