"""One trainer or framework each."""
