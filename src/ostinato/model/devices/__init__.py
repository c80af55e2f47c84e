"""The model's arithmetic by torch's own operations, on whatever device the tensors are: nothing here calls a compiled kernel of ours."""
