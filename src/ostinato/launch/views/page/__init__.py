"""The page's questions, answered from the log, the weight store and what the workers leave."""
