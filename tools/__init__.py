"""The tools of this project: set up, test, measure and prove. None of it is installed."""
