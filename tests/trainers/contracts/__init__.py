"""What the trainers' own types and validators demand, stated after their sources.

Each module names file and version of what it states, and is always tested against; where the
trainer itself can be imported, its own code is, too.
"""
