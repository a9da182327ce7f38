# The image of PostgreSQL runs this once, when it makes a new database: the role of hpo, which is no superuser,
# its database, and who may connect. HPO_CONNECTIONS is `host` or, to refuse those without TLS, `hostssl`.
set -e
psql --no-psqlrc --set=ON_ERROR_STOP=1 --username="$POSTGRES_USER" --dbname=postgres <<'SQL'
\getenv password POSTGRES_PASSWORD
CREATE ROLE hpo LOGIN PASSWORD :'password';
CREATE DATABASE hpo OWNER hpo;
SQL
printf '%s\n' 'local all all peer' "$HPO_CONNECTIONS hpo hpo all scram-sha-256" >"$PGDATA/pg_hba.conf"
