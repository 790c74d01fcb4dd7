"""What somebody might prepare to harm whoever opens it, and how much harm it does."""
