"""Dense linear algebra that several posteriors share: triangles, symmetric products, square roots."""
