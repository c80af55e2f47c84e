"""The model's arithmetic by torch's own operations, on the tensors' own device: nothing here calls a compiled kernel of ours."""
