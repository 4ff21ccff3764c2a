"""Which of several replicas a request goes to."""
