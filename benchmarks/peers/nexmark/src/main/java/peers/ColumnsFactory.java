package peers;

import java.io.DataInputStream;
import java.io.File;
import java.io.FileInputStream;
import java.io.IOException;
import java.util.Arrays;
import java.util.Collection;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import org.apache.flink.api.common.typeinfo.TypeInformation;
import org.apache.flink.configuration.ConfigOption;
import org.apache.flink.configuration.ConfigOptions;
import org.apache.flink.connector.file.src.FileSource;
import org.apache.flink.core.fs.Path;
import org.apache.flink.table.connector.ChangelogMode;
import org.apache.flink.table.connector.source.DynamicTableSource;
import org.apache.flink.table.connector.source.LookupTableSource;
import org.apache.flink.table.connector.source.ScanTableSource;
import org.apache.flink.table.connector.source.SourceProvider;
import org.apache.flink.table.connector.source.abilities.SupportsProjectionPushDown;
import org.apache.flink.table.connector.source.lookup.LookupFunctionProvider;
import org.apache.flink.table.data.RowData;
import org.apache.flink.table.factories.DynamicTableSourceFactory;
import org.apache.flink.table.factories.FactoryUtil;
import org.apache.flink.table.functions.FunctionContext;
import org.apache.flink.table.functions.LookupFunction;
import org.apache.flink.table.runtime.typeutils.InternalTypeInfo;
import org.apache.flink.table.types.DataType;
import org.apache.flink.table.types.logical.LogicalType;
import org.apache.flink.table.types.logical.LogicalTypeRoot;
import org.apache.flink.table.types.logical.RowType;

/** The connector 'columns': the files of a directory in `ColumnsFormat`, to read, or to look up by their first column. */
public class ColumnsFactory implements DynamicTableSourceFactory {
    private static final ConfigOption<String> PATH = ConfigOptions.key("path").stringType().noDefaultValue();

    @Override
    public DynamicTableSource createDynamicTableSource(Context context) {
        FactoryUtil.TableFactoryHelper helper = FactoryUtil.createTableFactoryHelper(this, context);
        helper.validate();
        RowType type = (RowType) context.getPhysicalRowDataType().getLogicalType();
        String kinds = type.getChildren().stream().map(ColumnsFactory::kind).collect(Collectors.joining());
        return new Source(helper.getOptions().get(PATH), kinds, IntStream.range(0, kinds.length()).toArray(), context.getPhysicalRowDataType());
    }

    private static String kind(LogicalType type) {
        if (type.is(LogicalTypeRoot.BIGINT)) {
            return "n";
        }
        return type.is(LogicalTypeRoot.TIMESTAMP_WITHOUT_TIME_ZONE) ? "t" : "s";
    }

    @Override
    public String factoryIdentifier() {
        return "columns";
    }

    @Override
    public Set<ConfigOption<?>> requiredOptions() {
        return Set.of(PATH);
    }

    @Override
    public Set<ConfigOption<?>> optionalOptions() {
        return Set.of();
    }

    /** The files of one directory. */
    private static final class Source implements ScanTableSource, LookupTableSource, SupportsProjectionPushDown {
        private final String directory;
        private final String kinds;
        private int[] chosen;
        private DataType produced;

        Source(String directory, String kinds, int[] chosen, DataType produced) {
            this.directory = directory;
            this.kinds = kinds;
            this.chosen = chosen;
            this.produced = produced;
        }

        private static File[] files(String directory) {
            File[] files = new File(directory).listFiles();
            Arrays.sort(files);
            return files;
        }

        @Override
        public ChangelogMode getChangelogMode() {
            return ChangelogMode.insertOnly();
        }

        @Override
        public ScanRuntimeProvider getScanRuntimeProvider(ScanContext context) {
            TypeInformation<RowData> type = InternalTypeInfo.of((RowType) produced.getLogicalType());
            Path[] paths = Arrays.stream(files(directory)).map(file -> new Path(file.toURI())).toArray(Path[]::new);
            return SourceProvider.of(FileSource.forRecordStreamFormat(new ColumnsFormat(kinds, chosen, type), paths).build());
        }

        @Override
        public LookupRuntimeProvider getLookupRuntimeProvider(LookupContext context) {
            return LookupFunctionProvider.of(new Lookup(directory, kinds, chosen));
        }

        @Override
        public boolean supportsNestedProjection() {
            return false;
        }

        @Override
        public void applyProjection(int[][] projected, DataType producedType) {
            int[] before = chosen;
            chosen = Arrays.stream(projected).mapToInt(path -> before[path[0]]).toArray();
            produced = producedType;
        }

        @Override
        public DynamicTableSource copy() {
            return new Source(directory, kinds, chosen, produced);
        }

        @Override
        public String asSummaryString() {
            return "columns in " + directory;
        }
    }

    /** All rows in memory, by their first column. */
    public static final class Lookup extends LookupFunction {
        private final String directory;
        private final String kinds;
        private final int[] chosen;
        private transient Map<Long, List<RowData>> rows;

        Lookup(String directory, String kinds, int[] chosen) {
            this.directory = directory;
            this.kinds = kinds;
            this.chosen = chosen;
        }

        @Override
        public void open(FunctionContext context) throws Exception {
            rows = new HashMap<>();
            for (File file : Source.files(directory)) {
                try (ColumnsFormat.Blocks blocks = new ColumnsFormat.Blocks(new DataInputStream(new FileInputStream(file)), kinds, chosen)) {
                    for (RowData row = blocks.read(); row != null; row = blocks.read()) {
                        rows.put(row.getLong(0), List.of(row));
                    }
                }
            }
        }

        @Override
        public Collection<RowData> lookup(RowData key) throws IOException {
            return rows.getOrDefault(key.getLong(0), List.of());
        }
    }
}
