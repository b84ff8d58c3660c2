"""What both ends of a channel share."""
