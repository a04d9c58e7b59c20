def heal(namespace, newcomers):
    return {"healed": [], "lost": {}, "missing": []}
