"""What everything shares: plans and their binary layout, messages, parameters, errors. No torch is loaded."""
