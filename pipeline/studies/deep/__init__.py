CLAIMS_FILE = "pipeline/studies/deep/claims.yaml"
