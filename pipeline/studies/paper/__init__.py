CLAIMS_FILE = "pipeline/studies/paper/claims.yaml"
