"""What does a replay client cost a token, and how far are its numbers from the truth? Ours and three others."""
