"""Values of records in the formats of a schema registry: Avro, Protobuf and JSON Schema, by the
client and the serializers of `confluent-kafka`. Any registry with Confluent's interface will do.

A value begins with a zero byte and the id of its schema in the registry, in four bytes. Protobuf
adds which message of the file it is. What follows is decoded by that schema, whichever version of
the topic's schema a producer used, and then checked against the topic's columns as JSON is: by
name, columns that are missing are null, and fields that the topic does not have are ignored and
counted.

    orders-value, version 3      {"type": "record", "fields": [{"name": "id", "type": "long"}, …]}
    a record of orders           00 00000007 0E …      by the schema with the id 7
    the row                      id = 7, …

Rows that Headrace appends are written by the newest schema of the subject `<topic>-value`. If it
has none, one is derived from the topic's columns and registered. Keys are written as on any other
topic: see `headrace.log.partitioning`.
"""

from __future__ import annotations

import base64
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, date, datetime, time
from decimal import Decimal
from functools import lru_cache
from typing import Any
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import pyarrow as pa

from headrace.errors import BadRows, ConfigurationError, MissingExtra, RetryError
from headrace.log.values import TopicInfo
from headrace.secrets import secret
from headrace.types.json_codec import (
    Decoded,
    JsonMismatch,
    UnknownFields,
    decode_rows,
    decode_rows_exactly,
    encode_rows,
)
from headrace.types.schema import declared_schema

try:
    from confluent_kafka.schema_registry import Schema, SchemaRegistryClient, SchemaRegistryError
    from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
    from confluent_kafka.schema_registry.common.protobuf import _init_pool
    from confluent_kafka.schema_registry.json_schema import JSONSerializer
    from confluent_kafka.schema_registry.protobuf import ProtobufSerializer
    from confluent_kafka.serialization import MessageField, SerializationContext
    from google.protobuf import descriptor_pb2, message_factory
    from google.protobuf.descriptor_pool import DescriptorPool
except ImportError as error:
    raise MissingExtra("confluent-kafka[avro,json,protobuf]", "registry") from error

MAGIC_BYTES = 5
"""The zero byte and the schema's id."""
NO_SCHEMA = 404
_HTTP_PACKAGES = {"httpx", "httpx2", "httpcore", "httpcore2"}
_LATEST = {"auto.register.schemas": False, "use.latest.version": True}


@lru_cache(maxsize=256)
def codec_of(info: TopicInfo) -> RegistryCodec:
    """The codec of a topic whose format is that of a registry."""
    return _CODECS[info.format](info)


class RegistryCodec(ABC):
    """Encodes and decodes the values of one topic."""

    schema_type: str
    """What the registry calls the format."""

    def __init__(self, info: TopicInfo) -> None:
        self.topic = info.name
        self.columns = declared_schema(info.arrow_schema)
        self.history = info.schema_history
        self.subject = f"{info.name}-value"
        self.client = _open_client(info.registry)
        self._registry = info.registry
        self._context = SerializationContext(info.name, MessageField.VALUE)
        self._encode: Callable[[dict[str, Any]], bytes] | None = None

    # Decoding

    def decode(
        self,
        values: Sequence[bytes],
        *,
        ignored: Collection[str] = (),
        unknown: UnknownFields | None = None,
    ) -> Decoded:
        """The rows of values; see `json_codec.decode_rows`."""
        return decode_rows_exactly(
            values,
            self.columns,
            ignored=ignored,
            history=self.history,
            unknown=unknown,
            parser=self._parse,
        )

    def _parse(self, value: bytes) -> Any:
        """The fields of a value, in the form of JSON. Raises JsonMismatch if it has none."""
        schema_id = _schema_id(value)
        schema = self._schema(schema_id)
        try:
            return _to_json(self.parse(value, schema_id, schema))
        except (JsonMismatch, RetryError, ConfigurationError):
            raise
        except Exception as error:  # any byte can be wrong, in any way
            if _is_of_registry(error):
                raise self._unavailable(error) from error
            raise JsonMismatch(
                f"it does not fit the registry's schema {schema_id}: {error}"
            ) from None

    @abstractmethod
    def parse(self, value: bytes, schema_id: int, schema: Schema) -> Any:
        """The fields of a value by its schema."""

    def _schema(self, schema_id: int) -> Schema:
        """A schema of the registry, which the client remembers."""
        try:
            return self.client.get_schema(schema_id, subject_name=self.subject, fmt=self._fmt)
        except SchemaRegistryError as error:
            if error.http_status_code == NO_SCHEMA:
                raise JsonMismatch(f"the registry has no schema {schema_id}") from None
            raise self._unavailable(error) from error
        except Exception as error:  # of the HTTP client
            raise self._unavailable(error) from error

    _fmt: str | None = None

    # Encoding

    def encode(self, rows: pa.RecordBatch) -> pa.BinaryArray:
        """The values of rows, by the newest schema of the topic."""
        if self._encode is None:
            self._encode = self._encoder()
        values = []
        for number, row in enumerate(self.fields(rows)):
            try:
                values.append(self._encode(row))
            except Exception as error:
                if _is_of_registry(error):
                    raise self._unavailable(error) from error
                raise BadRows(
                    f"Row {number} for {self.topic} does not fit the schema of {self.subject!r} in"
                    f" the registry: {error}.",
                    fix="correct the row, or register a schema that it fits.",
                ) from None
        return pa.array(values, pa.binary())

    def _encoder(self) -> Callable[[dict[str, Any]], bytes]:
        """A function that encodes a row by the newest schema. If there is none, one is registered
        that is derived from the topic's columns.
        """
        schema = self._latest_schema()
        if schema is None:
            derived = Schema(self.derived_schema(), self.schema_type)
            try:
                self.client.register_schema(self.subject, derived)
            except Exception as error:  # of the registry, or of the HTTP client
                raise self._unavailable(error) from error
            schema = self._latest_schema() or derived
        if schema.schema_type != self.schema_type:
            raise ConfigurationError(
                f"The subject {self.subject!r} of the registry is not of the format"
                f" {self.schema_type}, which the topic {self.topic!r} has.",
                fix="declare the topic with the format of its subject.",
            )
        missing = set(self.columns.names) - set(self.field_names(schema))
        if missing:
            raise ConfigurationError(
                f"The schema of {self.subject!r} in the registry has no field"
                f" {min(missing)!r}, which the topic {self.topic!r} has.",
                fix="register a schema that has it, or declare the topic without it.",
            )
        return self.encoder(schema)

    def _latest_schema(self) -> Schema | None:
        """The newest schema of the topic's subject; None if it has none."""
        try:
            return self.client.get_latest_version(self.subject, fmt=self._fmt).schema
        except SchemaRegistryError as error:
            if error.http_status_code == NO_SCHEMA:
                return None
            raise self._unavailable(error) from error
        except Exception as error:  # of the HTTP client
            raise self._unavailable(error) from error

    @abstractmethod
    def fields(self, rows: pa.RecordBatch) -> Iterator[dict[str, Any]]:
        """Each row in the form that the encoder takes."""

    @abstractmethod
    def encoder(self, schema: Schema) -> Callable[[dict[str, Any]], bytes]:
        """A function that encodes a row by a schema of the registry."""

    @abstractmethod
    def derived_schema(self) -> str:
        """A schema for the topic's columns."""

    @abstractmethod
    def field_names(self, schema: Schema) -> list[str]:
        """The fields of a schema of the registry."""

    def _unavailable(self, error: Exception) -> RetryError:
        return RetryError(
            f"The schema registry of the topic {self.topic!r} does not answer:"
            f" {str(error) or type(error).__name__}.",
            fix=f"check that it runs at {urlsplit(self._registry).netloc}, and try again.",
        )


@lru_cache(maxsize=16)
def _open_client(address: str) -> SchemaRegistryClient:
    """This process's client of the registry at an address. Options of the client are in its query;
    a value `env:NAME` or `file:PATH` is read from the environment or a file.
    """
    url = urlsplit(address)
    options: dict[str, Any] = {
        name: int(value) if value.isdecimal() else secret(name, value)
        for name, value in parse_qsl(url.query)
    }
    plain = urlunsplit((url.scheme, url.netloc, url.path.rstrip("/"), "", ""))
    try:
        return SchemaRegistryClient({"url": plain, **options})
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"The options of the schema registry are not valid: {error}.",
            fix="correct or remove the option.",
        ) from None


def _is_of_registry(error: Exception) -> bool:
    """Whether an error is the registry's or the network's, and not the record's."""
    package = type(error).__module__.partition(".")[0]
    return isinstance(error, SchemaRegistryError | OSError) or package in _HTTP_PACKAGES


def _schema_id(value: bytes) -> int:
    if len(value) < MAGIC_BYTES or value[0] != 0:
        raise JsonMismatch("it does not begin with the id of a schema, as a registry's records do")
    return int.from_bytes(value[1:MAGIC_BYTES], "big")


def _to_json(value: Any) -> Any:
    """A Python value as JSON represents it: see `headrace.types.json_codec`."""
    match value:
        case None | bool() | int() | str() | Decimal():
            return value
        case float():
            if math.isfinite(value):
                return Decimal(repr(value))
            return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        case bytes():
            return base64.b64encode(value).decode()
        case datetime():
            text = value.replace(tzinfo=None).isoformat(timespec="microseconds")
            return text if value.tzinfo is None else f"{_utc(value)}Z"
        case date():
            return value.isoformat()
        case time():
            return value.isoformat(timespec="microseconds")
        case dict():
            return {str(name): _to_json(part) for name, part in value.items()}
        case list() | tuple():
            return [_to_json(part) for part in value]
    return str(value)


def _utc(value: datetime) -> str:
    return value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds")


def _plain_rows(rows: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Rows as dicts, with dicts for maps with text keys."""
    converters = [(field.name, _maps_as_dicts(field.type)) for field in rows.schema]
    for row in rows.to_pylist():
        yield {name: convert(row[name]) for name, convert in converters}


def _maps_as_dicts(kind: pa.DataType) -> Callable[[Any], Any]:
    if pa.types.is_map(kind):
        key, item = _maps_as_dicts(kind.key_type), _maps_as_dicts(kind.item_type)
        if pa.types.is_string(kind.key_type):
            return _unless_none(lambda pairs: {name: item(part) for name, part in pairs})
        return _unless_none(
            lambda pairs: [{"key": key(name), "value": item(part)} for name, part in pairs]
        )
    if pa.types.is_list(kind):
        element = _maps_as_dicts(kind.value_type)
        return _unless_none(lambda values: [element(value) for value in values])
    if pa.types.is_struct(kind):
        parts = {child.name: _maps_as_dicts(child.type) for child in kind}
        return _unless_none(
            lambda value: {name: convert(value[name]) for name, convert in parts.items()}
        )
    return lambda value: value


def _unless_none(convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: None if value is None else convert(value)


# Avro


class AvroCodec(RegistryCodec):
    schema_type = "AVRO"

    def __init__(self, info: TopicInfo) -> None:
        super().__init__(info)
        self._deserializer = AvroDeserializer(self.client)

    def parse(self, value: bytes, schema_id: int, schema: Schema) -> Any:  # noqa: ARG002
        return self._deserializer(value, self._context)

    def fields(self, rows: pa.RecordBatch) -> Iterator[dict[str, Any]]:
        return _plain_rows(rows)

    def encoder(self, schema: Schema) -> Callable[[dict[str, Any]], bytes]:
        serializer = AvroSerializer(self.client, schema, conf=dict(_LATEST))
        return lambda row: serializer(row, self._context) or b""

    def derived_schema(self) -> str:
        fields = [_avro_field(column, column.name) for column in self.columns]
        name = "".join(char if char.isalnum() else "_" for char in self.topic)
        name = name if not name[0].isdigit() else f"_{name}"
        return json.dumps({"type": "record", "name": name, "fields": fields})

    def field_names(self, schema: Schema) -> list[str]:
        parsed = json.loads(schema.schema_str or "{}")
        return [field["name"] for field in parsed.get("fields", [])]


def _avro_field(column: pa.Field, path: str) -> dict[str, Any]:
    kind = _avro_type(column.type, path)
    if not column.nullable:
        return {"name": column.name, "type": kind}
    return {"name": column.name, "type": ["null", kind], "default": None}


def _avro_type(kind: pa.DataType, path: str) -> Any:
    """The Avro type of a column. The names of nested records are made of the path to them."""
    if pa.types.is_decimal(kind):
        return {
            "type": "bytes",
            "logicalType": "decimal",
            "precision": kind.precision,
            "scale": kind.scale,
        }
    if pa.types.is_timestamp(kind):
        name = "local-timestamp-micros" if kind.tz is None else "timestamp-micros"
        return {"type": "long", "logicalType": name}
    if pa.types.is_list(kind):
        return {"type": "array", "items": _avro_nullable(kind.value_field, f"{path}_item")}
    if pa.types.is_map(kind):
        if pa.types.is_string(kind.key_type):
            return {"type": "map", "values": _avro_nullable(kind.item_field, f"{path}_value")}
        pair = [
            {"name": "key", "type": _avro_type(kind.key_type, f"{path}_key")},
            {"name": "value", "type": _avro_nullable(kind.item_field, f"{path}_value")},
        ]
        return {
            "type": "array",
            "items": {"type": "record", "name": f"{path}_pair", "fields": pair},
        }
    if pa.types.is_struct(kind):
        fields = [_avro_field(child, f"{path}_{child.name}") for child in kind]
        return {"type": "record", "name": f"{path}_record", "fields": fields}
    for is_kind, name in _AVRO_TYPES:
        if is_kind(kind):
            return name
    raise _no_such_type(kind)


def _avro_nullable(field: pa.Field, path: str) -> Any:
    kind = _avro_type(field.type, path)
    return ["null", kind] if field.nullable else kind


_AVRO_TYPES: tuple[tuple[Callable[[pa.DataType], bool], Any], ...] = (
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_int64, "long"),
    (pa.types.is_integer, "int"),
    (pa.types.is_float64, "double"),
    (pa.types.is_floating, "float"),
    (pa.types.is_string, "string"),
    (pa.types.is_binary, "bytes"),
    (pa.types.is_date, {"type": "int", "logicalType": "date"}),
)


def _no_such_type(kind: pa.DataType) -> ConfigurationError:
    return ConfigurationError(
        f"A column of the type {kind} cannot be written in this format.",
        fix="register a schema for the topic yourself, or leave the column out.",
    )


# JSON Schema


class JsonSchemaCodec(RegistryCodec):
    schema_type = "JSON"

    def decode(
        self,
        values: Sequence[bytes],
        *,
        ignored: Collection[str] = (),
        unknown: UnknownFields | None = None,
    ) -> Decoded:
        """The rows of values. Behind the schema's id they are JSON, which says all by itself."""
        if all(len(value) > MAGIC_BYTES and value[0] == 0 for value in values):
            texts = [value[MAGIC_BYTES:] for value in values]
            return decode_rows(
                texts, self.columns, ignored=ignored, history=self.history, unknown=unknown
            )
        return super().decode(values, ignored=ignored, unknown=unknown)

    def parse(self, value: bytes, schema_id: int, schema: Schema) -> Any:  # noqa: ARG002
        return json.loads(value[MAGIC_BYTES:], parse_float=Decimal)

    def fields(self, rows: pa.RecordBatch) -> Iterator[dict[str, Any]]:
        return (json.loads(text) for text in encode_rows(rows))

    def encoder(self, schema: Schema) -> Callable[[dict[str, Any]], bytes]:
        serializer = JSONSerializer(schema, self.client, conf=dict(_LATEST))
        return lambda row: serializer(row, self._context) or b""

    def derived_schema(self) -> str:
        return json.dumps(
            {
                "$schema": "http://json-schema.org/draft-07/schema#",
                "title": self.topic,
                **_json_object(list(self.columns)),
            }
        )

    def field_names(self, schema: Schema) -> list[str]:
        properties = json.loads(schema.schema_str or "{}").get("properties")
        return self.columns.names if properties is None else list(properties)


def _json_object(columns: Sequence[pa.Field]) -> dict[str, Any]:
    required = [column.name for column in columns if not column.nullable]
    properties = {column.name: _json_property(column) for column in columns}
    return {"type": "object", "properties": properties} | (
        {"required": required} if required else {}
    )


def _json_property(column: pa.Field) -> dict[str, Any]:
    kind = _json_kind(column.type)
    return {"oneOf": [{"type": "null"}, kind]} if column.nullable else kind


def _json_kind(kind: pa.DataType) -> dict[str, Any]:
    if pa.types.is_boolean(kind):
        return {"type": "boolean"}
    if pa.types.is_integer(kind) or pa.types.is_duration(kind):
        return {"type": "integer"}
    if pa.types.is_floating(kind):
        return {"type": ["number", "string"]}  # NaN and infinities are strings
    if pa.types.is_struct(kind):
        return _json_object(list(kind))
    if pa.types.is_list(kind):
        return {"type": "array", "items": _json_property(kind.value_field)}
    if pa.types.is_map(kind):
        if pa.types.is_string(kind.key_type):
            return {"type": "object", "additionalProperties": _json_property(kind.item_field)}
        return {"type": "array", "items": {"type": "array"}}
    return {"type": "string"}


# Protobuf


class ProtobufCodec(RegistryCodec):
    schema_type = "PROTOBUF"
    _fmt = "serialized"

    def __init__(self, info: TopicInfo) -> None:
        super().__init__(info)
        self._files: dict[str, Any] = {}

    def parse(self, value: bytes, schema_id: int, schema: Schema) -> Any:  # noqa: ARG002
        indexes, start = _message_indexes(value, MAGIC_BYTES)
        message = self._message_class(schema, indexes)()
        message.ParseFromString(value[start:])
        return _message_fields(message)

    def fields(self, rows: pa.RecordBatch) -> Iterator[dict[str, Any]]:
        return _plain_rows(rows)

    def encoder(self, schema: Schema) -> Callable[[dict[str, Any]], bytes]:
        message_class = self._message_class(schema, [0])
        serializer = ProtobufSerializer(
            message_class, self.client, {**_LATEST, "use.deprecated.format": False}
        )

        def encode(row: dict[str, Any]) -> bytes:
            message = message_class()
            _fill_message(message, row)
            return serializer(message, self._context) or b""

        return encode

    def derived_schema(self) -> str:
        file = descriptor_pb2.FileDescriptorProto(name=f"{self.subject}.proto", syntax="proto3")
        _add_message(file, file.message_type.add(name="Row"), list(self.columns))
        return base64.b64encode(file.SerializeToString()).decode()

    def field_names(self, schema: Schema) -> list[str]:
        return [field.name for field in self._message_class(schema, [0]).DESCRIPTOR.fields]

    def _message_class(self, schema: Schema, indexes: Sequence[int]) -> Any:
        """The class of a message of a schema's file, by its position in the file."""
        text = schema.schema_str or ""
        if text not in self._files:
            if schema.references:
                raise ConfigurationError(
                    f"The Protobuf schema of {self.subject!r} imports other schemas of the"
                    " registry, which is not supported.",
                    fix="register one file that has all of its messages.",
                )
            file = descriptor_pb2.FileDescriptorProto()
            try:
                file.ParseFromString(base64.b64decode(text, validate=True))
            except Exception:  # each of protobuf's implementations has errors of its own
                raise ConfigurationError(
                    f"The registry gives the Protobuf schema of {self.subject!r} as text, not in"
                    " its serialized form.",
                    fix="register it with a serializer, as ProtobufSerializer does, or use a"
                    " registry that knows ?format=serialized.",
                ) from None
            file.name = file.name or "schema.proto"
            pool = DescriptorPool()
            _init_pool(pool)
            pool.Add(file)
            self._files[text] = pool.FindFileByName(file.name)
        first, *rest = indexes or [0]
        descriptor = list(self._files[text].message_types_by_name.values())[first]
        for index in rest:
            descriptor = descriptor.nested_types[index]
        return message_factory.GetMessageClass(descriptor)


def _message_indexes(value: bytes, start: int) -> tuple[list[int], int]:
    """Which message of a file a value is, as the positions of nested messages, and where the
    message begins. A single zero stands for the first message.
    """
    count, start = _varint(value, start)
    indexes = []
    for _ in range(count):
        index, start = _varint(value, start)
        indexes.append(index)
    return indexes, start


def _varint(value: bytes, start: int) -> tuple[int, int]:
    """A number in the zigzag encoding, and where it ends."""
    number = shift = 0
    while True:
        byte = value[start]
        number |= (byte & 0x7F) << shift
        start, shift = start + 1, shift + 7
        if not byte & 0x80:
            return (number >> 1) ^ -(number & 1), start


_TIMESTAMP = "google.protobuf.Timestamp"
_WRAPPERS = {
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
}


def _message_fields(message: Any) -> dict[str, Any]:
    """The fields of a message. A field that is not set is null if it can be told from its default
    value, and the default value otherwise.
    """
    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if _is_map(field):
            item = field.message_type.fields_by_name["value"]
            fields[field.name] = {str(key): _field_value(item, part) for key, part in value.items()}
        elif field.is_repeated:
            fields[field.name] = [_field_value(field, part) for part in value]
        elif field.has_presence and not message.HasField(field.name):
            fields[field.name] = None
        else:
            fields[field.name] = _field_value(field, value)
    return fields


def _is_map(field: Any) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _field_value(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        name = field.message_type.full_name
        if name == _TIMESTAMP:
            return value.ToDatetime(tzinfo=UTC)
        if name in _WRAPPERS:
            return value.value
        return _message_fields(value)
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return value if known is None else known.name
    return value


def _fill_message(message: Any, row: dict[str, Any]) -> None:
    for field in message.DESCRIPTOR.fields:
        value = row.get(field.name)
        if value is None:
            continue
        if _is_map(field):
            item = field.message_type.fields_by_name["value"]
            target = getattr(message, field.name)
            for key, part in value.items():
                if item.message_type is not None:
                    _set_message(target[key], part)
                else:
                    target[key] = _scalar(item, part)
        elif field.is_repeated:
            target = getattr(message, field.name)
            for part in value:
                if field.message_type is not None:
                    _set_message(target.add(), part)
                else:
                    target.append(_scalar(field, part))
        elif field.message_type is not None:
            getattr(message, field.name).SetInParent()
            _set_message(getattr(message, field.name), value)
        else:
            setattr(message, field.name, _scalar(field, value))


def _set_message(message: Any, value: Any) -> None:
    name = message.DESCRIPTOR.full_name
    if name == _TIMESTAMP:
        message.FromDatetime(value)
    elif name in _WRAPPERS:
        message.value = value
    else:
        _fill_message(message, value)


def _scalar(field: Any, value: Any) -> Any:
    if field.enum_type is not None and isinstance(value, str):
        return field.enum_type.values_by_name[value].number
    if field.cpp_type == field.CPPTYPE_STRING and not isinstance(value, str | bytes):
        return _to_json(value) if not isinstance(value, Decimal) else f"{value:f}"
    return value


def _add_message(file: Any, message: Any, columns: Sequence[pa.Field]) -> None:
    """Add a field to a message for each column. A scalar is optional, so that null is not 0."""
    types = descriptor_pb2.FieldDescriptorProto
    for number, column in enumerate(columns, 1):
        field = message.field.add(name=column.name, number=number, label=types.LABEL_OPTIONAL)
        kind = column.type
        if pa.types.is_list(kind):
            field.label, kind = types.LABEL_REPEATED, kind.value_type
        if pa.types.is_struct(kind):
            nested = message.nested_type.add(name=f"{column.name}_record")
            _add_message(file, nested, list(kind))
            field.type, field.type_name = types.TYPE_MESSAGE, nested.name
        elif pa.types.is_timestamp(kind) and kind.tz is not None:
            field.type, field.type_name = types.TYPE_MESSAGE, f".{_TIMESTAMP}"
            if "google/protobuf/timestamp.proto" not in file.dependency:
                file.dependency.append("google/protobuf/timestamp.proto")
        else:
            field.type = _proto_type(kind)
        if field.label == types.LABEL_OPTIONAL and field.type != types.TYPE_MESSAGE:
            field.proto3_optional = True
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{column.name}")


def _proto_type(kind: pa.DataType) -> Any:
    types = descriptor_pb2.FieldDescriptorProto
    for is_kind, field_type in (
        (pa.types.is_boolean, types.TYPE_BOOL),
        (pa.types.is_int64, types.TYPE_INT64),
        (pa.types.is_integer, types.TYPE_INT32),
        (pa.types.is_float64, types.TYPE_DOUBLE),
        (pa.types.is_floating, types.TYPE_FLOAT),
        (pa.types.is_string, types.TYPE_STRING),
        (pa.types.is_binary, types.TYPE_BYTES),
        # In a string, as JSON has them:
        (pa.types.is_decimal, types.TYPE_STRING),
        (pa.types.is_date, types.TYPE_STRING),
        (pa.types.is_timestamp, types.TYPE_STRING),
    ):
        if is_kind(kind):
            return field_type
    raise _no_such_type(kind)


_CODECS: dict[str, Callable[[TopicInfo], RegistryCodec]] = {
    "avro": AvroCodec,
    "json-schema": JsonSchemaCodec,
    "protobuf": ProtobufCodec,
}
