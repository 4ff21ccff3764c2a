"""Files of a model: configuration, weights, embedder settings."""
