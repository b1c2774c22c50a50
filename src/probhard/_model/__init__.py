"""Parts of ``probhard.model``: batches of data, and the losses of laws and of points."""
