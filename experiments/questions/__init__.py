"""Questions that readers of the paper asked, each answered by a table of its own."""
