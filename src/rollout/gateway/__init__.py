"""OpenAI- and Anthropic-compatible HTTP in front of transcripts."""
