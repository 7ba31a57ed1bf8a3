"""Files that appear whole or not at all, folders of runs that are resumed, and what identifies their model."""
