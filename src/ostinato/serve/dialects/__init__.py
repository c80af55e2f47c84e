"""The API dialects of the gateway (OpenAI's and Anthropic's): parse requests and write replies."""
