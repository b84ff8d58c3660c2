"""The APIs that clients speak: what a body asks for, and how answers are written."""
