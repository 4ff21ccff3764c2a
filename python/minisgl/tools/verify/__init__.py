"""`minisgl verify`: checks a checkpoint's logits on this machine, in every way in which a step can be computed."""
