package peers;

import java.io.DataInputStream;
import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.configuration.Configuration;
import org.apache.flink.connector.file.src.reader.SimpleStreamFormat;
import org.apache.flink.connector.file.src.reader.StreamFormat;
import org.apache.flink.core.fs.FSDataInputStream;
import org.apache.flink.table.data.GenericRowData;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.data.TimestampData;
import org.apache.flink.table.data.binary.BinaryStringData;

/**
 * Rows in blocks of columns, little-endian. A block: the number of rows, then for each column the number of its bytes and the
 * bytes. A number has 8 bytes, a time 8 bytes of milliseconds, a text the ends of all texts in 4 bytes each, then the texts.
 * Only the chosen columns become fields.
 */
public class ColumnsFormat extends SimpleStreamFormat<RowData> {
    private final String kinds; // by column of the file: n, t or s
    private final int[] chosen;
    private final TypeInformation<RowData> type;

    public ColumnsFormat(String kinds, int[] chosen, TypeInformation<RowData> type) {
        this.kinds = kinds;
        this.chosen = chosen;
        this.type = type;
    }

    @Override
    public StreamFormat.Reader<RowData> createReader(Configuration config, FSDataInputStream stream) {
        return new Blocks(new DataInputStream(stream), kinds, chosen);
    }

    @Override
    public TypeInformation<RowData> getProducedType() {
        return type;
    }

    /** Reads a block, and hands out its rows. */
    static final class Blocks implements StreamFormat.Reader<RowData> {
        private final DataInputStream in;
        private final String kinds;
        private final int[] chosen;
        private final byte[][] columns;
        private final ByteBuffer[] buffers;
        private int rows;
        private int next;

        Blocks(DataInputStream in, String kinds, int[] chosen) {
            this.in = in;
            this.kinds = kinds;
            this.chosen = chosen;
            this.columns = new byte[kinds.length()][];
            this.buffers = new ByteBuffer[kinds.length()];
        }

        @Override
        public RowData read() throws IOException {
            if (next == rows && !readBlock()) {
                return null;
            }
            GenericRowData row = new GenericRowData(chosen.length);
            for (int field = 0; field < chosen.length; field++) {
                row.setField(field, value(chosen[field], next));
            }
            next++;
            return row;
        }

        private boolean readBlock() throws IOException {
            byte[] number = new byte[4];
            if (in.readNBytes(number, 0, 4) < 4) {
                return false;
            }
            rows = ByteBuffer.wrap(number).order(ByteOrder.LITTLE_ENDIAN).getInt();
            next = 0;
            for (int column = 0; column < columns.length; column++) {
                in.readFully(number);
                columns[column] = new byte[ByteBuffer.wrap(number).order(ByteOrder.LITTLE_ENDIAN).getInt()];
                in.readFully(columns[column]);
                buffers[column] = ByteBuffer.wrap(columns[column]).order(ByteOrder.LITTLE_ENDIAN);
            }
            return true;
        }

        private Object value(int column, int row) {
            ByteBuffer buffer = buffers[column];
            switch (kinds.charAt(column)) {
                case 'n':
                    return buffer.getLong(8 * row);
                case 't':
                    return TimestampData.fromEpochMillis(buffer.getLong(8 * row));
                default:
                    int start = row == 0 ? 0 : buffer.getInt(4 * (row - 1));
                    int end = buffer.getInt(4 * row);
                    return BinaryStringData.fromBytes(columns[column], 4 * rows + start, end - start);
            }
        }

        @Override
        public void close() throws IOException {
            in.close();
        }
    }
}
