"""The small trained model that ships with the package; ``model/README.md`` says how it was made and what it can do."""
