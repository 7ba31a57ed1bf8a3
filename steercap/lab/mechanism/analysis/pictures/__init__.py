"""Pictures of this room's tables, of a size that a paper prints; PDF or SVG where the name of the file says it."""
