"""The tables of Postgres's catalogue: their columns, and the types that `pg_type` lists. What is in
them is in `catalogue`.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace._version import __version__
from headrace.serve.postgres import values

SERVER_VERSION = "15.0"
VERSION_TEXT = f"PostgreSQL {SERVER_VERSION} (Headrace {__version__})"

# Columns. Numbers of objects (oid) are UINTEGER, by which results tell them from other numbers.


COLUMNS = {
    "pg_namespace": "oid UINTEGER, nspname TEXT, nspowner UINTEGER, nspacl TEXT[]",
    "pg_class": (
        "oid UINTEGER, relname TEXT, relnamespace UINTEGER, reltype UINTEGER, reloftype"
        " UINTEGER, relowner UINTEGER, relam UINTEGER, relfilenode UINTEGER, reltablespace"
        " UINTEGER, relpages INT, reltuples FLOAT, relallvisible INT, reltoastrelid"
        " UINTEGER, relhasindex BOOL, relisshared BOOL, relpersistence TEXT, relkind TEXT,"
        " relnatts SMALLINT, relchecks SMALLINT, relhasrules BOOL, relhastriggers BOOL,"
        " relhassubclass BOOL, relrowsecurity BOOL, relforcerowsecurity BOOL,"
        " relispopulated BOOL, relreplident TEXT, relispartition BOOL, relrewrite UINTEGER,"
        " relfrozenxid UINTEGER, relminmxid UINTEGER, relhasoids BOOL, relacl TEXT[],"
        " reloptions TEXT[], relpartbound TEXT"
    ),
    "pg_attribute": (
        "attrelid UINTEGER, attname TEXT, atttypid UINTEGER, attstattarget INT, attlen"
        " SMALLINT, attnum SMALLINT, attndims INT, attcacheoff INT, atttypmod INT, attbyval"
        " BOOL, attalign TEXT, attstorage TEXT, attcompression TEXT, attnotnull BOOL,"
        " atthasdef BOOL, atthasmissing BOOL, attidentity TEXT, attgenerated TEXT,"
        " attisdropped BOOL, attislocal BOOL, attinhcount INT, attcollation UINTEGER,"
        " attacl TEXT[], attoptions TEXT[], attfdwoptions TEXT[], attmissingval TEXT"
    ),
    "pg_type": (
        "oid UINTEGER, typname TEXT, typnamespace UINTEGER, typowner UINTEGER, typlen"
        " SMALLINT, typbyval BOOL, typtype TEXT, typcategory TEXT, typispreferred BOOL,"
        " typisdefined BOOL, typdelim TEXT, typrelid UINTEGER, typsubscript TEXT, typelem"
        " UINTEGER, typarray UINTEGER, typinput TEXT, typoutput TEXT, typreceive TEXT,"
        " typsend TEXT, typmodin TEXT, typmodout TEXT, typanalyze TEXT, typalign TEXT,"
        " typstorage TEXT, typnotnull BOOL, typbasetype UINTEGER, typtypmod INT, typndims"
        " INT, typcollation UINTEGER, typdefaultbin TEXT, typdefault TEXT, typacl TEXT[]"
    ),
    "pg_index": (
        "indexrelid UINTEGER, indrelid UINTEGER, indnatts SMALLINT, indnkeyatts SMALLINT,"
        " indisunique BOOL, indnullsnotdistinct BOOL, indisprimary BOOL, indisexclusion"
        " BOOL, indimmediate BOOL, indisclustered BOOL, indisvalid BOOL, indcheckxmin BOOL,"
        " indisready BOOL, indislive BOOL, indisreplident BOOL, indkey SMALLINT[],"
        " indcollation UINTEGER[], indclass UINTEGER[], indoption SMALLINT[], indexprs"
        " TEXT, indpred TEXT"
    ),
    "pg_constraint": (
        "oid UINTEGER, conname TEXT, connamespace UINTEGER, contype TEXT, condeferrable"
        " BOOL, condeferred BOOL, convalidated BOOL, conrelid UINTEGER, contypid UINTEGER,"
        " conindid UINTEGER, conparentid UINTEGER, confrelid UINTEGER, confupdtype TEXT,"
        " confdeltype TEXT, confmatchtype TEXT, conislocal BOOL, coninhcount INT,"
        " connoinherit BOOL, conkey SMALLINT[], confkey SMALLINT[], conpfeqop UINTEGER[],"
        " conppeqop UINTEGER[], conffeqop UINTEGER[], confdelsetcols SMALLINT[], conexclop"
        " UINTEGER[], conbin TEXT, consrc TEXT"
    ),
    "pg_database": (
        "oid UINTEGER, datname TEXT, datdba UINTEGER, encoding INT, datlocprovider TEXT,"
        " datistemplate BOOL, datallowconn BOOL, datconnlimit INT, datfrozenxid UINTEGER,"
        " datminmxid UINTEGER, dattablespace UINTEGER, datcollate TEXT, datctype TEXT,"
        " daticulocale TEXT, datcollversion TEXT, datacl TEXT[]"
    ),
    "pg_roles": (
        "oid UINTEGER, rolname TEXT, rolsuper BOOL, rolinherit BOOL, rolcreaterole BOOL,"
        " rolcreatedb BOOL, rolcanlogin BOOL, rolreplication BOOL, rolconnlimit INT,"
        " rolpassword TEXT, rolvaliduntil TIMESTAMPTZ, rolbypassrls BOOL, rolconfig TEXT[]"
    ),
    "pg_user": (
        "usename TEXT, usesysid UINTEGER, usecreatedb BOOL, usesuper BOOL, userepl BOOL,"
        " usebypassrls BOOL, passwd TEXT, valuntil TIMESTAMPTZ, useconfig TEXT[]"
    ),
    "pg_settings": (
        "name TEXT, setting TEXT, unit TEXT, category TEXT, short_desc TEXT, extra_desc"
        " TEXT, context TEXT, vartype TEXT, source TEXT, min_val TEXT, max_val TEXT,"
        " enumvals TEXT[], boot_val TEXT, reset_val TEXT, sourcefile TEXT, sourceline INT,"
        " pending_restart BOOL"
    ),
    "pg_am": "oid UINTEGER, amname TEXT, amhandler TEXT, amtype TEXT",
    "pg_tables": (
        "schemaname TEXT, tablename TEXT, tableowner TEXT, tablespace TEXT, hasindexes"
        " BOOL, hasrules BOOL, hastriggers BOOL, rowsecurity BOOL"
    ),
    "pg_indexes": (
        "schemaname TEXT, tablename TEXT, indexname TEXT, tablespace TEXT, indexdef TEXT"
    ),
    "pg_stat_user_tables": (
        "relid UINTEGER, schemaname TEXT, relname TEXT, seq_scan BIGINT, seq_tup_read"
        " BIGINT, idx_scan BIGINT, idx_tup_fetch BIGINT, n_tup_ins BIGINT, n_tup_upd"
        " BIGINT, n_tup_del BIGINT, n_live_tup BIGINT, n_dead_tup BIGINT, last_vacuum"
        " TIMESTAMPTZ, last_autovacuum TIMESTAMPTZ, last_analyze TIMESTAMPTZ,"
        " last_autoanalyze TIMESTAMPTZ"
    ),
    "pg_proc": (
        "oid UINTEGER, proname TEXT, pronamespace UINTEGER, proowner UINTEGER, prolang"
        " UINTEGER, prokind TEXT, proretset BOOL, prorettype UINTEGER, proargtypes"
        " UINTEGER[], proallargtypes UINTEGER[], proargmodes TEXT[], proargnames TEXT[],"
        " pronargs SMALLINT, pronargdefaults SMALLINT, proisstrict BOOL, provolatile TEXT,"
        " prosrc TEXT, proacl TEXT[], prosecdef BOOL, proleakproof BOOL, procost FLOAT,"
        " prorows FLOAT, provariadic UINTEGER, probin TEXT, proconfig TEXT[], prosupport"
        " TEXT, proparallel TEXT, proargdefaults TEXT, protrftypes UINTEGER[], prosqlbody"
        " TEXT, proisagg BOOL, proiswindow BOOL"
    ),
}
EMPTY = {
    "pg_attrdef": "oid UINTEGER, adrelid UINTEGER, adnum SMALLINT, adbin TEXT, adsrc TEXT",
    "pg_description": "objoid UINTEGER, classoid UINTEGER, objsubid INT, description TEXT",
    "pg_shdescription": "objoid UINTEGER, classoid UINTEGER, description TEXT",
    "pg_inherits": "inhrelid UINTEGER, inhparent UINTEGER, inhseqno INT, inhdetachpending BOOL",
    "pg_auth_members": (
        "oid UINTEGER, roleid UINTEGER, member UINTEGER, grantor UINTEGER, admin_option"
        " BOOL, inherit_option BOOL, set_option BOOL"
    ),
    "pg_views": "schemaname TEXT, viewname TEXT, viewowner TEXT, definition TEXT",
    "pg_matviews": (
        "schemaname TEXT, matviewname TEXT, matviewowner TEXT, tablespace TEXT, hasindexes"
        " BOOL, ispopulated BOOL, definition TEXT"
    ),
    "pg_trigger": (
        "oid UINTEGER, tgrelid UINTEGER, tgparentid UINTEGER, tgname TEXT, tgfoid UINTEGER,"
        " tgtype SMALLINT, tgenabled TEXT, tgisinternal BOOL, tgconstrrelid UINTEGER,"
        " tgconstrindid UINTEGER, tgconstraint UINTEGER, tgdeferrable BOOL, tginitdeferred"
        " BOOL, tgnargs SMALLINT, tgattr SMALLINT[], tgargs TEXT, tgqual TEXT, tgoldtable"
        " TEXT, tgnewtable TEXT"
    ),
    "pg_rewrite": (
        "oid UINTEGER, rulename TEXT, ev_class UINTEGER, ev_type TEXT, ev_enabled TEXT,"
        " is_instead BOOL, ev_qual TEXT, ev_action TEXT"
    ),
    "pg_policy": (
        "oid UINTEGER, polname TEXT, polrelid UINTEGER, polcmd TEXT, polpermissive BOOL,"
        " polroles UINTEGER[], polqual TEXT, polwithcheck TEXT"
    ),
    "pg_statistic_ext": (
        "oid UINTEGER, stxrelid UINTEGER, stxname TEXT, stxnamespace UINTEGER, stxowner"
        " UINTEGER, stxstattarget INT, stxkeys SMALLINT[], stxkind TEXT[], stxexprs TEXT"
    ),
    "pg_publication": (
        "oid UINTEGER, pubname TEXT, pubowner UINTEGER, puballtables BOOL, pubinsert BOOL,"
        " pubupdate BOOL, pubdelete BOOL, pubtruncate BOOL, pubviaroot BOOL"
    ),
    "pg_publication_rel": (
        "oid UINTEGER, prpubid UINTEGER, prrelid UINTEGER, prqual TEXT, prattrs SMALLINT[]"
    ),
    "pg_publication_namespace": "oid UINTEGER, pnpubid UINTEGER, pnnspid UINTEGER",
    "pg_subscription": "oid UINTEGER, subname TEXT, subowner UINTEGER, subenabled BOOL",
    "pg_foreign_table": "ftrelid UINTEGER, ftserver UINTEGER, ftoptions TEXT[]",
    "pg_foreign_server": (
        "oid UINTEGER, srvname TEXT, srvowner UINTEGER, srvfdw UINTEGER, srvtype TEXT,"
        " srvversion TEXT, srvacl TEXT[], srvoptions TEXT[]"
    ),
    "pg_foreign_data_wrapper": (
        "oid UINTEGER, fdwname TEXT, fdwowner UINTEGER, fdwhandler UINTEGER, fdwvalidator"
        " UINTEGER, fdwacl TEXT[], fdwoptions TEXT[]"
    ),
    "pg_sequence": (
        "seqrelid UINTEGER, seqtypid UINTEGER, seqstart BIGINT, seqincrement BIGINT, seqmax"
        " BIGINT, seqmin BIGINT, seqcache BIGINT, seqcycle BOOL"
    ),
    "pg_sequences": "schemaname TEXT, sequencename TEXT, sequenceowner TEXT, data_type TEXT",
    "pg_collation": (
        "oid UINTEGER, collname TEXT, collnamespace UINTEGER, collowner UINTEGER,"
        " collprovider TEXT, collisdeterministic BOOL, collencoding INT, collcollate TEXT,"
        " collctype TEXT"
    ),
    "pg_enum": "oid UINTEGER, enumtypid UINTEGER, enumsortorder FLOAT, enumlabel TEXT",
    "pg_range": (
        "rngtypid UINTEGER, rngsubtype UINTEGER, rngmultitypid UINTEGER, rngcollation"
        " UINTEGER, rngsubopc UINTEGER, rngcanonical TEXT, rngsubdiff TEXT"
    ),
    "pg_extension": (
        "oid UINTEGER, extname TEXT, extowner UINTEGER, extnamespace UINTEGER,"
        " extrelocatable BOOL, extversion TEXT, extconfig UINTEGER[], extcondition TEXT[]"
    ),
    "pg_available_extensions": (
        "name TEXT, default_version TEXT, installed_version TEXT, comment TEXT"
    ),
    "pg_language": (
        "oid UINTEGER, lanname TEXT, lanowner UINTEGER, lanispl BOOL, lanpltrusted BOOL"
    ),
    "pg_operator": (
        "oid UINTEGER, oprname TEXT, oprnamespace UINTEGER, oprowner UINTEGER, oprkind"
        " TEXT, oprleft UINTEGER, oprright UINTEGER, oprresult UINTEGER"
    ),
    "pg_opclass": (
        "oid UINTEGER, opcmethod UINTEGER, opcname TEXT, opcnamespace UINTEGER, opcowner"
        " UINTEGER, opcfamily UINTEGER, opcintype UINTEGER, opcdefault BOOL, opckeytype"
        " UINTEGER"
    ),
    "pg_cast": (
        "oid UINTEGER, castsource UINTEGER, casttarget UINTEGER, castfunc UINTEGER,"
        " castcontext TEXT"
    ),
    "pg_aggregate": "aggfnoid UINTEGER, aggkind TEXT, aggnumdirectargs SMALLINT",
    "pg_event_trigger": (
        "oid UINTEGER, evtname TEXT, evtevent TEXT, evtowner UINTEGER, evtenabled TEXT"
    ),
    "pg_tablespace": (
        "oid UINTEGER, spcname TEXT, spcowner UINTEGER, spcacl TEXT[], spcoptions TEXT[]"
    ),
    "pg_locks": (
        "locktype TEXT, database UINTEGER, relation UINTEGER, pid INT, mode TEXT, granted BOOL"
    ),
    "pg_stat_activity": (
        "datid UINTEGER, datname TEXT, pid INT, usesysid UINTEGER, usename TEXT,"
        " application_name TEXT, client_addr TEXT, backend_start TIMESTAMPTZ, query_start"
        " TIMESTAMPTZ, state_change TIMESTAMPTZ, wait_event TEXT, state TEXT, query TEXT,"
        " backend_type TEXT"
    ),
    "pg_stat_database": "datid UINTEGER, datname TEXT, numbackends INT, xact_commit BIGINT",
    "pg_stat_ssl": "pid INT, ssl BOOL, version TEXT, cipher TEXT, bits INT",
    "pg_stat_gssapi": "pid INT, gss_authenticated BOOL, principal TEXT, encrypted BOOL",
    "pg_partitioned_table": "partrelid UINTEGER, partstrat TEXT, partnatts SMALLINT",
    "pg_depend": (
        "classid UINTEGER, objid UINTEGER, objsubid INT, refclassid UINTEGER, refobjid"
        " UINTEGER, refobjsubid INT, deptype TEXT"
    ),
    "pg_shdepend": (
        "dbid UINTEGER, classid UINTEGER, objid UINTEGER, refclassid UINTEGER, refobjid UINTEGER"
    ),
    "pg_timezone_names": "name TEXT, abbrev TEXT, utc_offset TEXT, is_dst BOOL",
    "pg_default_acl": (
        "oid UINTEGER, defaclrole UINTEGER, defaclnamespace UINTEGER, defaclobjtype TEXT,"
        " defaclacl TEXT[]"
    ),
    "pg_seclabel": "objoid UINTEGER, classoid UINTEGER, objsubid INT, provider TEXT, label TEXT",
    "pg_seclabels": "objoid UINTEGER, classoid UINTEGER, objsubid INT, provider TEXT, label TEXT",
    "pg_prepared_statements": "name TEXT, statement TEXT",
    "pg_cursors": "name TEXT, statement TEXT",
    "pg_rules": "schemaname TEXT, tablename TEXT, rulename TEXT, definition TEXT",
    "pg_user_mappings": (
        "umid UINTEGER, srvid UINTEGER, srvname TEXT, umuser UINTEGER, usename TEXT"
    ),
    "pg_db_role_setting": "setdatabase UINTEGER, setrole UINTEGER, setconfig TEXT[]",
}
INFORMATION = {
    "schemata": (
        "catalog_name TEXT, schema_name TEXT, schema_owner TEXT,"
        " default_character_set_catalog TEXT, default_character_set_schema TEXT,"
        " default_character_set_name TEXT, sql_path TEXT"
    ),
    "tables": (
        "table_catalog TEXT, table_schema TEXT, table_name TEXT, table_type TEXT,"
        " self_referencing_column_name TEXT, reference_generation TEXT,"
        " user_defined_type_catalog TEXT, user_defined_type_schema TEXT,"
        " user_defined_type_name TEXT, is_insertable_into TEXT, is_typed TEXT,"
        " commit_action TEXT"
    ),
    "columns": (
        "table_catalog TEXT, table_schema TEXT, table_name TEXT, column_name TEXT,"
        " ordinal_position INT, column_default TEXT, is_nullable TEXT, data_type TEXT,"
        " character_maximum_length INT, character_octet_length INT, numeric_precision INT,"
        " numeric_precision_radix INT, numeric_scale INT, datetime_precision INT,"
        " interval_type TEXT, interval_precision INT, character_set_name TEXT,"
        " collation_name TEXT, domain_name TEXT, udt_catalog TEXT, udt_schema TEXT,"
        " udt_name TEXT, dtd_identifier TEXT, is_self_referencing TEXT, is_identity TEXT,"
        " identity_generation TEXT, is_generated TEXT, generation_expression TEXT,"
        " is_updatable TEXT"
    ),
    "table_constraints": (
        "constraint_catalog TEXT, constraint_schema TEXT, constraint_name TEXT,"
        " table_catalog TEXT, table_schema TEXT, table_name TEXT, constraint_type TEXT,"
        " is_deferrable TEXT, initially_deferred TEXT, enforced TEXT"
    ),
    "key_column_usage": (
        "constraint_catalog TEXT, constraint_schema TEXT, constraint_name TEXT,"
        " table_catalog TEXT, table_schema TEXT, table_name TEXT, column_name TEXT,"
        " ordinal_position INT, position_in_unique_constraint INT"
    ),
    "constraint_column_usage": (
        "table_catalog TEXT, table_schema TEXT, table_name TEXT, column_name TEXT,"
        " constraint_catalog TEXT, constraint_schema TEXT, constraint_name TEXT"
    ),
    "table_privileges": (
        "grantor TEXT, grantee TEXT, table_catalog TEXT, table_schema TEXT, table_name"
        " TEXT, privilege_type TEXT, is_grantable TEXT, with_hierarchy TEXT"
    ),
}
EMPTY_INFORMATION = {
    "referential_constraints": (
        "constraint_catalog TEXT, constraint_schema TEXT, constraint_name TEXT,"
        " unique_constraint_catalog TEXT, unique_constraint_schema TEXT,"
        " unique_constraint_name TEXT, match_option TEXT, update_rule TEXT, delete_rule"
        " TEXT"
    ),
    "views": (
        "table_catalog TEXT, table_schema TEXT, table_name TEXT, view_definition TEXT,"
        " check_option TEXT, is_updatable TEXT, is_insertable_into TEXT"
    ),
    "routines": (
        "specific_catalog TEXT, specific_schema TEXT, specific_name TEXT, routine_catalog"
        " TEXT, routine_schema TEXT, routine_name TEXT, routine_type TEXT, data_type TEXT,"
        " routine_definition TEXT, external_language TEXT, type_udt_name TEXT"
    ),
    "parameters": (
        "specific_catalog TEXT, specific_schema TEXT, specific_name TEXT, ordinal_position"
        " INT, parameter_mode TEXT, parameter_name TEXT, data_type TEXT"
    ),
    "sequences": "sequence_catalog TEXT, sequence_schema TEXT, sequence_name TEXT, data_type TEXT",
    "triggers": "trigger_catalog TEXT, trigger_schema TEXT, trigger_name TEXT",
    "domains": "domain_catalog TEXT, domain_schema TEXT, domain_name TEXT, data_type TEXT",
    "check_constraints": (
        "constraint_catalog TEXT, constraint_schema TEXT, constraint_name TEXT, check_clause TEXT"
    ),
    "element_types": "object_schema TEXT, object_name TEXT, data_type TEXT",
    "column_privileges": (
        "grantor TEXT, grantee TEXT, table_catalog TEXT, table_schema TEXT, table_name"
        " TEXT, column_name TEXT, privilege_type TEXT, is_grantable TEXT"
    ),
}
TABLES = frozenset(COLUMNS) | frozenset(EMPTY)
INFORMATION_TABLES = frozenset(INFORMATION) | frozenset(EMPTY_INFORMATION)


# Types


@dataclass(frozen=True)
class TypeRow:
    """A type of Postgres's, as `pg_type` has it."""

    oid: int
    name: str
    sql_name: str
    size: int
    category: str
    element: int = 0


_PLAIN_TYPES = (
    TypeRow(values.BOOL, "bool", "boolean", 1, "B"),
    TypeRow(values.BYTEA, "bytea", "bytea", -1, "U"),
    TypeRow(18, "char", '"char"', 1, "Z"),
    TypeRow(values.NAME, "name", "name", 64, "S"),
    TypeRow(values.INT8, "int8", "bigint", 8, "N"),
    TypeRow(values.INT2, "int2", "smallint", 2, "N"),
    TypeRow(values.INT4, "int4", "integer", 4, "N"),
    TypeRow(values.TEXT_OID, "text", "text", -1, "S"),
    TypeRow(values.OID, "oid", "oid", 4, "N"),
    TypeRow(values.JSON, "json", "json", -1, "U"),
    TypeRow(values.FLOAT4, "float4", "real", 4, "N"),
    TypeRow(values.FLOAT8, "float8", "double precision", 8, "N"),
    TypeRow(values.UNKNOWN, "unknown", "unknown", -2, "X"),
    TypeRow(values.BPCHAR, "bpchar", "character", -1, "S"),
    TypeRow(values.VARCHAR, "varchar", "character varying", -1, "S"),
    TypeRow(values.DATE, "date", "date", 4, "D"),
    TypeRow(values.TIME, "time", "time without time zone", 8, "D"),
    TypeRow(values.TIMESTAMP, "timestamp", "timestamp without time zone", 8, "D"),
    TypeRow(values.TIMESTAMPTZ, "timestamptz", "timestamp with time zone", 8, "D"),
    TypeRow(values.INTERVAL, "interval", "interval", 16, "T"),
    TypeRow(values.NUMERIC, "numeric", "numeric", -1, "N"),
    TypeRow(values.REGCLASS, "regclass", "regclass", 4, "N"),
    TypeRow(values.UUID, "uuid", "uuid", 16, "U"),
    TypeRow(values.JSONB, "jsonb", "jsonb", -1, "U"),
)
_BY_OID = {row.oid: row for row in _PLAIN_TYPES}
TYPES = (
    *_PLAIN_TYPES,
    *(
        TypeRow(
            array, f"_{_BY_OID[element].name}", f"{_BY_OID[element].sql_name}[]", -1, "A", element
        )
        for array, element in sorted(values.ARRAY_ELEMENTS.items())
    ),
)
SQL_NAMES = {row.oid: row.sql_name for row in TYPES}
