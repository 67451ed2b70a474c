"""The public operations: linear layers, dropout, losses, optimizers and so on. They do not import each other."""
