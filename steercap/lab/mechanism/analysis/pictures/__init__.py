"""Pictures of the analysis tables, in print sizes; the file name's suffix sets the format, such as PDF or SVG."""
