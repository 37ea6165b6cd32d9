"""Read traces that somebody else recorded, a file each format; `formats.FORMATS` is the table."""
