"""Reading and rewriting jaxprs: inlining to one flat list, dead code, substitution, structural keys."""
