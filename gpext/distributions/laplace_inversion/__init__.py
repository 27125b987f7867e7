"""The mixing density of any completely monotone phi, by inverting its Laplace transform numerically."""
