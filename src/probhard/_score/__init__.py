"""Parts of ``probhard.score``: checks of arguments, skewed laws, constraint violations."""
