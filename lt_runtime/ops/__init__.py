"""What a script calls: linear layers, dropout, losses, AdamW. Operations do not import each other."""
